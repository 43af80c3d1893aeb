"""Request bodies, one module per API family."""
