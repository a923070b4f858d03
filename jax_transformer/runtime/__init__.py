"""What surrounds a process: several processes, signals, the allocator, a supervisor."""
