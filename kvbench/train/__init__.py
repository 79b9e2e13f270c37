"""Training: the reference LM from scratch, and learned policies by distillation under their own mask."""
