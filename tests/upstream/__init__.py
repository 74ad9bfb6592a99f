"""Programs and tests of other projects, run on this one; none of their code is kept here."""
