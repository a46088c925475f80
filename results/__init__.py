"""Published trials (``published/``, committed), trials of this machine (``local/``, ignored), and the paper's values."""
