"""Where anything becomes true: one conditional append to a small versioned log."""
