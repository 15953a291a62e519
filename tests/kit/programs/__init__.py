"""Random programs: what users write, and the same in elementary operations for the truth."""
