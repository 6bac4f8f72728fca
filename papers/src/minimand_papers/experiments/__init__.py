"""One file an experiment; a module here joins by existing, unless its name begins with an underscore."""
