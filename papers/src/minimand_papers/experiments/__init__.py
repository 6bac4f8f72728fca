"""One folder per source, one module per experiment; modules that begin with an underscore hold shared code."""
