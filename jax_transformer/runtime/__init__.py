"""The surroundings of a process: several processes, signals, the allocator, entry points."""
