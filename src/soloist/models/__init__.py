"""Model families: each file says how a config.json is read, which blocks follow, and where every tensor goes."""
