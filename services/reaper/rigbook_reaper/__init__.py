"""The reaper: drift over desired, bound and observed; node silence; healing by rule."""
