"""Published trials (``published``, committed), trials of this machine (``local``, ignored), the paper's values."""
