"""From one command to the ranks of a run, on this host or several, watched and started again."""
