"""Everything that runs in the notebook kernel: magics, views, runs."""
