"""The policies that ship with kvbench, one file or folder each; `plugin` announces them."""
