"""An exported model behind HTTP, with a page to try it: `longstride serve`. Needs aiohttp, which is imported late."""

from longstride.launcher.serving.serve import add_arguments, run
