"""Made-up tokens in the exact forms of real ones, put together when they are asked for: no scanner of repositories
finds one in this file.
"""

from __future__ import annotations

import base64
import json
import random
import string

HEX = "0123456789abcdef"
UPPER = string.ascii_uppercase + string.digits
BASE62 = string.ascii_letters + string.digits
URL64 = BASE62 + "-_"

FORMS: dict[str, list[tuple[str, int] | str]] = {
    "Hugging Face": ["hf", "_", (string.ascii_letters, 34)],
    "OpenAI, old": ["sk", "-", (BASE62, 20), "T3Blbk", "FJ", (BASE62, 20)],
    "OpenAI, project": ["sk", "-proj-", (URL64, 74), "T3Blbk", "FJ", (URL64, 74)],
    "OpenAI, service account": ["sk", "-svcacct-", (URL64, 58), "T3Blbk", "FJ", (URL64, 58)],
    "Anthropic": ["sk", "-ant-api03-", (URL64, 93), "AA"],
    "OpenRouter": ["sk", "-or-v1-", (HEX, 64)],
    "W&B, 40 digits": [(HEX, 40)],
    "W&B, v1": ["wandb", "_v1_", (BASE62, 77)],
    "Comet": [(BASE62, 25)],
    "ClearML access key": [(UPPER, 30)],
    "ClearML secret key": [(BASE62, 50)],
    "Databricks": ["dapi", (HEX, 32)],
    "Databricks, with a number": ["dapi", (HEX, 32), "-2"],
    "NVIDIA": ["nvapi", "-", (URL64, 64)],
    "Replicate": ["r8", "_", (BASE62, 37)],
    "Groq": ["gsk", "_", (BASE62, 52)],
    "xAI": ["xai", "-", (BASE62, 80)],
    "Perplexity": ["pplx", "-", (BASE62, 48)],
    "Together": [(HEX, 64)],
    "LangSmith": ["lsv2", "_pt_", (HEX, 32), "_", (HEX, 10)],
    "RunPod": ["rpa", "_", (UPPER, 44)],
    "GitHub, classic": ["gh", "p_", (BASE62, 36)],
    "GitHub, OAuth": ["gh", "o_", (BASE62, 36)],
    "GitHub, user": ["gh", "u_", (BASE62, 36)],
    "GitHub, server": ["gh", "s_", (BASE62, 36)],
    "GitHub, refresh": ["gh", "r_", (BASE62, 36)],
    "GitHub, fine-grained": ["github", "_pat_", (BASE62, 22), "_", (BASE62, 59)],
    "GitLab, personal": ["gl", "pat-", (URL64, 20)],
    "GitLab, deploy": ["gl", "dt-", (URL64, 20)],
    "GitLab, runner": ["gl", "rt-", (URL64, 20)],
    "GitLab, CI job": ["gl", "cbt-64_", (URL64, 20)],
    "GitLab, trigger": ["gl", "ptt-", (HEX, 40)],
    "GitLab, runner registration": ["GR13", "48941", (URL64, 20)],
    "npm": ["npm", "_", (BASE62, 36)],
    "PyPI": ["pypi", "-AgEIcHlwaS5vcmc", (URL64, 150)],
    "Docker Hub": ["dckr", "_pat_", (URL64, 27)],
    "Bitbucket": ["ATBB", (BASE62, 32)],
    "Atlassian": ["ATAT", "T3xFfGF0", (URL64, 180), "=", (UPPER, 8)],
    "AWS access key id": ["AK", "IA", (UPPER, 16)],
    "AWS temporary key id": ["AS", "IA", (UPPER, 16)],
    "AWS secret key": [(BASE62, 13), "/", (BASE62, 12), "+", (BASE62, 13)],
    "Google API key": ["AI", "za", (URL64, 35)],
    "Google OAuth": ["ya", "29.", (URL64, 60)],
    "Google client secret": ["GOC", "SPX-", (URL64, 28)],
    "Azure client secret": [(BASE62, 3), "8Q~", (BASE62, 34)],
    "Azure DevOps": [(string.ascii_lowercase + "234567", 52)],
    "DigitalOcean": ["dop", "_v1_", (HEX, 64)],
    "Vault": ["hv", "s.", (URL64, 90)],
    "Terraform Cloud": [(BASE62, 14), ".atlas", "v1.", (URL64, 67)],
    "Doppler": ["dp", ".pt.", (BASE62, 43)],
    "Pulumi": ["pul", "-", (HEX, 40)],
    "Grafana": ["gl", "sa_", (BASE62, 32), "_", (HEX, 8)],
    "New Relic": ["NR", "AK-", (UPPER, 27)],
    "Datadog": [(HEX, 40)],
    "Slack, bot": ["xox", "b-", (string.digits, 12), "-", (string.digits, 12), "-", (BASE62, 24)],
    "Slack, user": ["xox", "p-", (string.digits, 12), "-", (string.digits, 12), "-", (HEX, 32)],
    "Slack, app": ["xapp", "-1-A", (UPPER, 10), "-", (string.digits, 13), "-", (HEX, 64)],
    "Discord, bot": ["MT", (BASE62, 24), ".", (URL64, 6), ".", (URL64, 38)],
    "Telegram": [("123456789", 10), ":AA", (URL64, 33)],
    "Twilio": ["S", "K", (HEX, 32)],
    "SendGrid": ["S", "G.", (URL64, 22), ".", (URL64, 43)],
    "Mailgun": ["ke", "y-", (HEX, 32)],
    "Mailchimp": [(HEX, 32), "-us21"],
    "Stripe, live": ["sk", "_live_", (BASE62, 24)],
    "Stripe, restricted": ["rk", "_live_", (BASE62, 99)],
    "Stripe, webhook": ["whsec", "_", (BASE62, 32)],
    "Square": ["sq0", "csp-", (URL64, 43)],
    "Shopify": ["shp", "at_", (HEX, 32)],
    "Linear": ["lin", "_api_", (BASE62, 40)],
    "Notion": ["ntn", "_", (BASE62, 46)],
    "age": ["AGE-SECRET", "-KEY-1", (UPPER, 58)],
    "Slack webhook": ["https://hooks.slack.com/services/T", (UPPER, 8), "/B", (UPPER, 8), "/", (BASE62, 24)],
    "Discord webhook": ["https://discord.com/api/webhooks/", (string.digits, 18), "/", (URL64, 68)],
    "Mattermost webhook": ["https://chat.example.com/hooks/", (string.ascii_lowercase, 26)],
}
"""Service → what its token is made of: fixed text, and (letters, how many) of random ones."""


def made(form: str) -> str:
    """A token of this form, always the same."""
    rng = random.Random(form)
    return "".join(p if isinstance(p, str) else "".join(rng.choices(p[0], k=p[1])) for p in FORMS[form])


def json_web_token() -> str:
    parts = [{"alg": "HS256", "typ": "JWT"}, {"sub": "1", "name": "Ann"}]
    words = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts]
    return ".".join([*words, "c2lnbmF0dXJlLW9mLW5vYm9keQ"])


def private_key(kind: str) -> str:
    dashes = "-" * 5
    body = "\n".join("".join(random.Random(n).choices(BASE62 + "+/", k=64)) for n in range(3))
    return f"{dashes}BEGIN {kind}{dashes}\n{body}\n{dashes}END {kind}{dashes}"


def service_account() -> str:
    """A key of Google Cloud, as JSON."""
    key = private_key("PRIVATE KEY")
    return json.dumps(
        {"type": "service_account", "private_key_id": made("W&B, 40 digits"), "private_key": key}
    )
