from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("django_ratequota", "0007_history_by_object"),
    ]

    operations = [
        migrations.AlterField(
            model_name="endpoint",
            name="methods",
            field=models.CharField(
                blank=True,
                help_text="HTTP methods separated by spaces, such as GET POST; empty = all. HEAD counts as GET. Methods that a view does not tell from these count as well. OPTIONS answered by an options handler counts only where it is named.",
                max_length=100,
                verbose_name="methods",
            ),
        ),
    ]
