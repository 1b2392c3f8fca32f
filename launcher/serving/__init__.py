"""An exported model behind HTTP, with a page to try it: `longstride serve`. Needs aiohttp, which is imported late."""
