"""What `soloist doctor` looks at. Every check returns findings; system files are read below a `root`, for tests."""
