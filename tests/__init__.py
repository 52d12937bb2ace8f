"""Tests of Headstart; the folders mirror the four packages."""
