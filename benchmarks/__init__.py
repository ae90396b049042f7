"""Memory and speed of the training step, measured against PyTorch."""
