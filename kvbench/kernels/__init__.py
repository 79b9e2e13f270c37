"""Attention and log-sum-exps over whole sequences in linear memory: a plain form each, and a fast one for GPUs."""
