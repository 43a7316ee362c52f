"""What a pair takes of a device, from configurations and headers alone."""
