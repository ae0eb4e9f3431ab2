"""Tokens of real services go, in whatever text they stand, and the work of finding them grows with the text only."""

from __future__ import annotations

import json
import time

import pytest
import token_forms

from ddpdoctor.rundir.privacy import LONGEST_TEXT, MASK, mask_text
from ddpdoctor.rundir.secretnames import names_secret

TEXTS = (
    "{}",
    "train.py --x {}",
    "x={};",
    "https://host/path?a={}&b=1",
    "'{}'",
    '{{"x": "{}"}}',
    "x%3D{}",
    "a\\n{}",
)


@pytest.mark.parametrize("form", token_forms.FORMS)
def test_a_token_is_known_by_its_form(form):
    token = token_forms.made(form)
    kept = 30 if token.startswith("https://") else 4  # the host of a webhook, or the prefix, may stay
    for text in TEXTS:
        masked = mask_text(text.format(token))
        assert MASK in masked
        assert not [token[at : at + 8] for at in range(kept, len(token) - 8) if token[at : at + 8] in masked]


@pytest.mark.parametrize(
    "kind",
    [
        "PRIVATE KEY",
        "RSA PRIVATE KEY",
        "EC PRIVATE KEY",
        "OPENSSH PRIVATE KEY",
        "ENCRYPTED PRIVATE KEY",
        "PGP PRIVATE KEY BLOCK",
    ],
)
def test_a_private_key_goes_whole(kind):
    key = token_forms.private_key(kind)
    assert mask_text(f"before {key} after") == "before *** after"
    assert mask_text(f"before {key[:200]}") == "before ***"
    assert mask_text(json.dumps({"pem": key, "lr": 1})) == '{"pem": "***", "lr": 1}'


def test_json_web_tokens_and_service_accounts():
    assert mask_text(f"jwt {token_forms.json_web_token()} end") == "jwt *** end"
    assert mask_text(token_forms.service_account()) == (
        '{"type": "service_account", "private_key_id": "***", "private_key": "***"}'
    )


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ('{"api_key": "a b", "lr": 1}', '{"api_key": ***, "lr": 1}'),
        ("{'password': 'a\\'b', 'lr': 1}", "{'password': ***, 'lr': 1}"),
        ('{"a": {"client_secret": "x"}, "b": ["token", "c"]}', '{"a": {"client_secret": ***}, "b": ["token", ***]}'),
        ('{\\"token\\": \\"a b\\", \\"lr\\": 1}', '{\\"token\\": ***, \\"lr\\": 1}'),
        ('[{"name": "HF_TOKEN", "value": "a b"}, {"name": "LR"}]', '[{"name": "HF_TOKEN", "value": ***}, {"name": "LR"}]'),
        ("api_key: a\nlr: 1\npassword: two words\nseed: 3", "api_key: ***\nlr: 1\npassword: ***\nseed: 3"),
        ('[x]\ntoken = "a b"\nlr = 1', "[x]\ntoken = ***\nlr = 1"),
        ("x secrets: [a, b] lr: 1", "x secrets: *** lr: 1"),
        ("X-Api-Key: a b\nAccept: */*", "X-Api-Key: ***\nAccept: */*"),
        ("Authorization: Bearer a b\nAccept: */*", "Authorization: Bearer ***\nAccept: */*"),
        ("Proxy-Authorization: Basic QWxhZGRpbjpvcGVu", "Proxy-Authorization: Basic ***"),
        ("Cookie: a=b; c=d\nAccept: */*", "Cookie: ***\nAccept: */*"),
        ("machine h login me password a?b c", "machine h login me password *** c"),
        ("export PW=a;python x --token 'a b' --lr 1", "export PW=*** x --token *** --lr 1"),
        ("os.environ['HF_TOKEN'] = 'a'; run(lr=1)", "os.environ['HF_TOKEN'] = ***; run(lr=1)"),
        ("AccountName=me;AccountKey=ab==", "AccountName=me;AccountKey=***"),
        ("https://me:a/b@host/x?lr=1", "https://***@host/x?lr=1"),
        ("postgresql+psycopg://me:a@b/c@host:5432/db", "postgresql+psycopg://***@host:5432/db"),
        ("redis://:a@host:6379/0", "redis://***@host:6379/0"),
        ("mongodb+srv://me:a@h1,h2/db?w=1", "mongodb+srv://***@h1,h2/db?w=1"),
        ("me:a@tcp(host:3306)/db", "me:***@tcp(host:3306)/db"),
        ("https://h/c?sv=1&sig=a%2Fb&se=2", "https://h/c?sv=1&sig=***&se=2"),
        ("https://h/bot?key=a&lr=1", "https://h/bot?key=***&lr=1"),
        ("https://prod.webhook.office.com/webhookb2/a@b/IncomingWebhook/c/d end", "https://prod.webhook.office.com/webhookb2/*** end"),
    ],
)  # fmt: skip
def test_a_value_goes_where_its_name_says_so(text, masked):
    assert mask_text(text) == masked


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True), ("HF_TOKEN_2", True), ("apiKey", True), ("X-Api-Key", True), ("db_password", True),
        ("PASSWORD_B64", True), ("SLACK_WEBHOOK_URL", True), ("SENTRY_DSN", True), ("signing-key", True),
        ("AZURE_STORAGE_CONNECTION_STRING", True), ("SharedAccessKey", True), ("auth_token_value", True),
        ("tokenizer", False), ("max_tokens", False), ("pad_token", False), ("eos-token", False), ("token_id", False),
        ("token_file", False), ("author", False), ("sort_key", False), ("forward_pass", False), ("passes", False), ("", False),
    ],
)  # fmt: skip
def test_names(name, secret):
    assert names_secret(name) is secret


SECRET = [
    "--kaggle_key", "--kaggleKey", "--wandb_api", "--creds", "--cred", "--login", "--tokens.hf", "--tokens.wandb", "--hf_tok",
    "--auth-tok", "--otp", "--totp", "--otp_code", "--pin", "--user-pin", "--hsm_pin", "FI_KEY", "MY_SERVICE_KEY", "--github-key",
    "--key.openai", "--keys.anthropic", "--db.psw", "--pswd", "--passw", "--mfa", "--api-tokens", "--secrets.hf", "ROBOFLOW_API",
    "kaggle.key", "--hf-login", "--access_tok", "--password.minio", "NGC_KEY",
]  # fmt: skip
NO_SECRET = [
    "--pin-memory", "--pin_memory", "--pin_mem", "--cpu-pin", "--thread_pin", "--numa-pin", "I_MPI_PIN", "--key", "--keys",
    "--key-size", "--key_dim", "--tok", "--toks", "--tokenizer", "--tok_type", "--tokens", "--max-tokens", "--max_new_tokens",
    "--num-tokens", "--max-tokens.openai", "--image-tokens", "--tokens-per-batch", "--login-node", "--login_shell", "--relogin",
    "--sort-key", "--sort_key", "--image_key", "--label-keys", "--caption-key", "FI_PROVIDER", "FI_MR_KEY", "SORT_KEY",
    "CACHE_KEY", "FI_MR_KEY_SIZE", "--api", "--api-version", "--rest_api", "--api-base", "--hf", "--hf-model", "--wandb",
    "--wandb-project", "--wandb_mode", "--optim", "--option", "--pinning", "--spin", "--loginfo", "--credit", "--passes",
    "--monkey", "--keyframe", "--openai-model", "--s3-bucket", "--kaggle-dataset", "--hotpath", "--keypoints",
    "--key_padding_mask", "NCCL_IB_PKEY", "--author", "--signal", "--shared_keys_dim", "KEY", "KEYS", "--group_by_key",
    "--metric-key",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_names_made_of_parts_or_short_for_a_secret(name):
    assert names_secret(name)


@pytest.mark.parametrize("name", NO_SECRET)
def test_names_that_only_look_like_a_secrets(name):
    assert not names_secret(name)


REPEATED = (
    "a", "A", "a.-", "a+", "a=", "?a", "a:b@", "://", "http", "eyJ", "eyJ.", "{", "pw=[", "token=", "token='", "token=\\\"",
    "'a", '"', "\\", "--token ", "a\\\n", "name: ", "bearer ", "basic a-", "login a password ", "sshpass -p ", "mysql ", "1/",
    "-----BEGIN PRIVATE KEY----", "-----BEGIN ", "sk-", "SG.", "xox", "1234567890:", "a1B2-", "%3D", "Cookie: ", "name=", "name:='",
    "token=$(", "$(",
)  # fmt: skip
BOUND_S = 30
"""Patterns that are quadratic take minutes of processor time for these texts, these take two seconds."""


def test_the_work_grows_with_the_text():
    begin_s = time.process_time()
    for piece in REPEATED:
        mask_text((piece * LONGEST_TEXT)[:LONGEST_TEXT])
    assert time.process_time() - begin_s < BOUND_S


def test_a_long_text_is_cut_and_says_so():
    text = "a " * LONGEST_TEXT
    masked = mask_text(text)
    assert masked.startswith("a a a") and masked.endswith(f"a ... ({LONGEST_TEXT} more letters)")


@pytest.mark.parametrize("place", range(0, 60, 6))
def test_a_cut_leaves_no_piece_of_a_token(place):
    token = token_forms.made("Hugging Face")
    filling = "a " * LONGEST_TEXT
    masked = mask_text(f"{filling[: LONGEST_TEXT - place]}{token} b")
    assert token[3:9] not in masked and token[:6] not in masked
    assert token[3:9] not in mask_text(f"{'a' * (LONGEST_TEXT - place)}{token}{'b' * 5000}")
