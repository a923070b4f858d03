"""One file per architecture, and the registry that knows them all."""
