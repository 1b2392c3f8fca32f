"""From one command to the ranks of a run, on this host or several, supervised and restarted.

Hands out the modules of its two verbs, and imports neither: what starts and stops processes must not wait for torch.
"""
