"""SmolLM2-135M-Instruct, a published model that a package of the Python index ships: conversion, prompts and demo."""
