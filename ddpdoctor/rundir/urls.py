"""Credentials in URLs: before the host, and webhooks, which are secrets as a whole."""

from __future__ import annotations

import re

_AFTER_SCHEME = re.compile(r"""://([^\s"'`<>|]+)""")
"""Begun at its fixed part: a scheme before it is a word of any length."""
_WITHOUT_SCHEME = re.compile(r"""(?<![\w./:@+-])([\w.-]{1,64}:)[^\s@/"'`<>:=]{1,256}@(?=\w)(?!sha256)""")
"""``user:password@host``, as drivers of databases and rsync take it."""
_WEBHOOK = re.compile(r"(?i:(?:^|/)hooks?\.[^/]+/|/(?:web)?hooks?(?:b2)?/|^maker\.ifttt\.com/)")
"""Slack, Discord, Teams, Mattermost, Zapier, GitLab and whoever else calls a path so."""
_CONTAINER_BEFORE_AT = ("abfs", "abfss", "wasb", "wasbs")
"""Schemes of Azure, in which a container's name stands before the ``@``."""


def mask_urls(text: str, mask: str) -> str:
    """``text`` with users and passwords in URLs, and the paths of webhooks, replaced by ``mask``."""

    def replace(found: re.Match[str]) -> str:
        scheme = text[max(0, found.start() - 8) : found.start()].lower()
        return "://" + _mask_rest(found[1], scheme.endswith(_CONTAINER_BEFORE_AT), mask)

    text = _AFTER_SCHEME.sub(replace, text)
    return _WITHOUT_SCHEME.sub(rf"\g<1>{mask}@", text)


def _mask_rest(rest: str, names_container: bool, mask: str) -> str:
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # A password may hold a slash or an @; what follows the last one is then the host. A digest is none.
    last = rest.rfind("@") if ":" in authority else -1
    at = authority.rfind("@") if rest.startswith("sha256:", last + 1) else max(authority.rfind("@"), last)
    if at >= 0 and not (names_container and ":" not in authority[:at]):
        rest = f"{mask}@{rest[at + 1 :]}"
    hook = _WEBHOOK.search(rest)
    return rest[: hook.end()] + mask if hook else rest
