"""The commands of ``seht``, one file each: arguments, and the function that runs them."""
