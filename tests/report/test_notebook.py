"""What a notebook shows: ``Diagnosis._repr_html_``, as IPython finds it."""

from html.parser import HTMLParser

import pytest
import samples

import ddpdoctor


class Parts(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not {name for name, _ in attrs} - {"style"}, "no addresses, no handlers"

    def handle_data(self, data):
        self.words += data


def test_a_notebook_shows_the_cost_and_the_fix():
    found = Parts(samples.unhealthy()._repr_html_())
    assert "Rank 1 waits 46 ms per step for data" in found.words
    assert "44.8 ms (87 %)" in found.words and "train.py:57" in found.words and "num_workers=4" in found.words


def test_a_healthy_job_has_nothing_to_change():
    assert "pre" not in Parts(samples.healthy()._repr_html_()).tags


@pytest.mark.parametrize("name", sorted(samples.ALL))
def test_names_from_the_job_are_escaped(name):
    tags = Parts(samples.ALL[name]()._repr_html_()).tags
    assert not {"script", "img", "iframe", "a", "link"} & set(tags)


def test_the_public_api_has_the_notebook_view(request):
    diagnosis = ddpdoctor.analyze(request.config.rootpath / "fixtures" / "slow-data-one-rank")
    assert "Rank 1 waits" in diagnosis._repr_html_()
