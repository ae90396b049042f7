"""From eager maths to ExecuTorch block programs in a bundle."""
