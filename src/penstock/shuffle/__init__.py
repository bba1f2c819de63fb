"""Progress in, read plans out: which documents a task may process next, all shards together."""
