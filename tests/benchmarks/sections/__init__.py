"""The sections of `make bench`: each measures some figures side by side with a peer."""
