"""The tasks that ship with kvbench, one file each; `plugin` announces them."""
