"""The workstation: photos to bundle, and adapter to pictures."""
