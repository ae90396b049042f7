"""The methods PocketDiT is compared with, one file each, behind `base.Method`."""
