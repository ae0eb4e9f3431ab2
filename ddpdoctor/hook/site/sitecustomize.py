# mypy: ignore-errors
# Runs at the start of every Python process of `ddpdoctor run`, whatever its version. So it uses old syntax only and
# raises no exception.
import sys


def _use_hook():
    import os
    import types

    package = types.ModuleType("_ddpdoctor")
    here = os.path.dirname(os.path.abspath(__file__))
    package.__path__ = [os.path.dirname(os.path.dirname(here))]
    sys.modules["_ddpdoctor"] = package
    from _ddpdoctor.hook import fatalsignals, finder

    fatalsignals.watch()
    finder.after_import("torch", "_ddpdoctor.hook.install", "install")


def _run_the_users_own():
    # This file is first on the path and hides any other sitecustomize, such as that of a conda environment or a company:
    # run that one, too.
    import os
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    here = os.path.realpath(os.path.dirname(os.path.abspath(__file__)))
    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.realpath(p or ".") != here])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    import os as _os

    if _os.environ.get("DDPDOCTOR_RUN") and sys.version_info >= (3, 9) and _os.name == "posix":
        _use_hook()
except Exception:
    pass
if sys.version_info >= (3, 5):  # noqa: UP036
    _run_the_users_own()
