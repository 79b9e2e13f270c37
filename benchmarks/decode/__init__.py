"""The decode kernels: that they compute what the plain forms do, and what they and a whole step cost beside the bytes they move."""
