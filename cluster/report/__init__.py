"""HTML report about one job, or about several jobs side by side: one file that needs nothing but a browser.

facts             collects what is known of a job, as plain data
tables            the tables as text
charts            the charts as SVG
page              renders report.html.jinja, macros.html.jinja and style.css
"""
