"""Model, policy and budget -> tokens: the registered attention function, slots, prefill, the decode loop, sampling, CUDA graphs."""
