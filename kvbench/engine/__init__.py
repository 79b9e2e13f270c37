"""Model, policy and budget -> tokens: the attention function, slots, prefill, the decode loop, sampling, CUDA graphs."""
