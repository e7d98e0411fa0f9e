"""The commands of `python -m infer`, one file each, and the options that they share."""
