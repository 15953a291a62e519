"""Experiments with `seht`. They need the extra `seht[lab]`; the library never imports them."""
