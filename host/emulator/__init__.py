"""Runs the runtime under the limits of a phone and says whether a bundle trains there."""
