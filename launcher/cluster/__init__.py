"""Start the ranks of a run on this host or several, supervise them, and restart them.

Other packages import its modules directly. This file imports none of them, so that `import` stays quick.
"""
