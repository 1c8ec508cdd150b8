"""What a change of a model costs and saves: conversion and heads that go; data, answers before and after, time, reports."""
