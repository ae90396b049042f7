"""Trains from a bundle within a memory budget. Imports neither host nor export; twin of android_demo."""

__version__ = "0.1.0"
