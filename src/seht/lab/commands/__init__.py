"""The lab's commands, one file each: arguments, and the function that runs them."""
