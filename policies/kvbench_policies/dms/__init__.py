"""Dynamic Memory Sparsification: a learned gate decides for each token by itself whether it stays."""
