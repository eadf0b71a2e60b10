"""The API key that requests have to bring, if there is to be one."""

from collections.abc import Mapping

from compress.errors import UserError

KEY_VARIABLE = "COMPRESS_API_KEY"


def key_of(environ: Mapping[str, str]) -> str | None:
    """The API key, if there is to be one; raises UserError for one that no header can carry."""
    key = environ.get(KEY_VARIABLE, "").rstrip("\r\n")  # which a file ends with
    for place, character in enumerate(key, 1):
        if not "!" <= character <= "~":
            raise UserError(
                f"{KEY_VARIABLE} has {character!r} at character {place}; wanted visible ASCII "
                "alone, which every client can send"
            )
    return key or None
