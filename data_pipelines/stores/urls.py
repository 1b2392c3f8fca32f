"""URLs of remote folders: which of them can be read here, and how messages show them without credentials."""

import inspect
import re
from urllib.parse import unquote

from longstride.data_pipelines.errors import DataError

WEB = ("http", "https")
GOOD = "good ones are https://, s3://, gs://, az:// and hf://"
_SHOWN_CHARACTERS = 200  # of what a server or a library says
_READ_CHARACTERS = 2000  # of it, to find what must not be shown
_URL = re.compile(r"(?P<protocol>[A-Za-z][A-Za-z0-9+.:-]*)://(?:(?P<user>[^/?#]*)@)?(?P<path>.*)", re.DOTALL)
_ANY_USER = re.compile(r"://[^/\s'\"]*@")
_ANY_QUERY = re.compile(r"(://[^\s'\"?]*)\?[^\s'\")]*")


class FolderUrl:
    """The URL of a remote folder. Only ``shown`` and what the methods for messages return may be printed."""

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        assert match is not None
        self.url, self.protocol = url, match["protocol"].lower()  # such as https
        self._user = f"{match['user']}@" if match["user"] else ""  # user:password@ or nothing
        self._path, self._query = match["path"], ""  # host and path; ?query or nothing
        if self.protocol in WEB:
            self._path, mark, query = self._path.partition("#")[0].partition("?")
            self._query = mark + query
        self.shown = self.hide(url)  # as the user wrote it, with *** in place of user, password and query

    def of(self, name: str) -> str:
        """Return the URL of a file of the folder, credentials included."""
        return f"{self.protocol}://{self._user}{self._path.rstrip('/')}/{name}{self._query}"

    def shown_of(self, name: str) -> str:
        """Return the URL of a file of the folder, for messages."""
        return self.hide(self.of(name))

    def hide(self, text: str) -> str:
        """Remove this URL's secrets from a text, and users and queries of any other URL in it."""
        text = _ANY_QUERY.sub(r"\1?***", _ANY_USER.sub("://***@", text))
        return self._without_secrets(text)

    def quote(self, message: object) -> str:
        """Return what a server or a library says as one printable line, cut short and without secrets."""
        # Own secrets first: a cut through one would leave what looks like none.
        words = " ".join(self._without_secrets(str(message))[:_READ_CHARACTERS].split())
        line = "".join(letter if letter.isprintable() else "?" for letter in self.hide(words))
        return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]} …"

    def check_protocol(self) -> None:
        """Raise DataError, saying what to install, for a protocol that cannot be read here."""
        import fsspec

        protocol = self.protocol
        if "::" in self.url:
            raise DataError(f"{self.shown}: chained protocols (::) are not read; name the folder that holds the files")
        try:
            filesystem = fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            library = getattr(error.__cause__, "name", None)  # such as gcsfs
            raise DataError(
                f"{self.shown}: the library that reads {protocol}:// is not installed; "
                + (f"pip install {library.partition('.')[0]}" if library else str(error))
            ) from error
        except ValueError as error:
            raise DataError(f"{self.shown}: {protocol}:// is no protocol that fsspec knows; {GOOD}") from error
        try:
            inspect.signature(filesystem.__init__).bind(None)
        except TypeError as error:  # such as ftp://
            raise DataError(
                f"{self.shown}: fsspec asks for more than a URL to read {protocol}:// ({error}); {GOOD}"
            ) from error

    def _without_secrets(self, text: str) -> str:
        user = self._user[:-1]
        for secret in (user, user.partition(":")[2], self._query[1:]):
            for form in {secret, unquote(secret)}:
                if len(form) > 2:
                    text = text.replace(form, "***")
        return text
