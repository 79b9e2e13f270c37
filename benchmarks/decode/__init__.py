"""The decode kernels: that they compute what the plain forms do, and what they and whole steps cost beside their floor."""
