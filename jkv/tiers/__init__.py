"""Where pages lie behind the device: host memory and a store."""
