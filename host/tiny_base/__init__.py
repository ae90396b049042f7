"""The embedded base model: weights, autoencoder, text encoder, sample subject."""
