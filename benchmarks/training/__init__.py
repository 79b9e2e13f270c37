"""What training at a paper's scale costs, and that its kernels compute what the plain forms do."""
